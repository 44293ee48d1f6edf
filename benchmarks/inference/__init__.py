# SPDX-License-Identifier: Apache-2.0
"""Generation with a model whose weights do not fit into GPU memory: ``tencache bench inference``."""
