# SPDX-License-Identifier: Apache-2.0
"""What was observed: the recorded order of accesses, and what the machine and its storage are and can do."""
