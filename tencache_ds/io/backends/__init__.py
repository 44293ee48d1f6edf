# SPDX-License-Identifier: Apache-2.0
"""What moves bytes: the protocol, what speaks it, and the registry that says which there are."""
