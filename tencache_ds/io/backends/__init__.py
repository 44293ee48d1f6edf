# SPDX-License-Identifier: Apache-2.0
"""Storage backends: the protocol, its implementations, and their registry."""
