# SPDX-License-Identifier: Apache-2.0
"""What builds the components of a model and of a DeepSpeed engine, and owns them: the composition root."""
