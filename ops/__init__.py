# SPDX-License-Identifier: Apache-2.0
"""Native ops: found through DeepSpeed's op builders and built just in time, or at installation on request."""
