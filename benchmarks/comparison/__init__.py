# SPDX-License-Identifier: Apache-2.0
"""Who is compared, the search for the best settings, and the rounds in which the configurations alternate."""
