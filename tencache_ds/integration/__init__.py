# SPDX-License-Identifier: Apache-2.0
"""The only room that touches DeepSpeed's internals: activation, the seams, and the classes handed to DeepSpeed."""
