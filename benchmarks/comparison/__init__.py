# SPDX-License-Identifier: Apache-2.0
"""The systems compared, the search for the best settings, and the rounds in which the configurations alternate."""
