# SPDX-License-Identifier: Apache-2.0
"""The only place that knows DeepSpeed's versions. All other code is written for the newest one.

Each module ``v0_*`` holds what its line of DeepSpeed brought, as :class:`~.versions.Change`: how an older DeepSpeed is
brought up to it. :mod:`.installed` applies those that the installed version lacks. What an older version does worse,
but right, is no change: a seam of a feature that can be left to DeepSpeed
(:class:`~tencache_ds.integration.seams.Feature`) decides by itself.
"""
