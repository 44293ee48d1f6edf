# SPDX-License-Identifier: Apache-2.0
"""The only package that touches DeepSpeed's internals: activation, the seams, and the classes passed to DeepSpeed."""
