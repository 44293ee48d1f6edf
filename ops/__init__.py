# SPDX-License-Identifier: Apache-2.0
"""Native ops: found through DeepSpeed's op builders, built just in time, never at installation."""
