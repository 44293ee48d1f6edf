# SPDX-License-Identifier: Apache-2.0
"""Micro-benchmarks of the components: pool, storage, CPU update. ``python -m benchmarks.micro all --nvme-path
FOLDER``."""
