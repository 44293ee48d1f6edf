# SPDX-License-Identifier: Apache-2.0
"""Training with long sequences: what moving activations costs and frees, compared with others that move them."""
