# SPDX-License-Identifier: Apache-2.0
"""The places of weights, gradients, optimizer state and activations while a model runs: what decides them and what
moves things between them."""
