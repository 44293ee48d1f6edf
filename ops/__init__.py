# SPDX-License-Identifier: Apache-2.0
"""Native ops: located through DeepSpeed's op builders and built just in time, or at installation on request."""
