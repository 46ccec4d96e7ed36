# SPDX-License-Identifier: Apache-2.0
"""Attention over paged and packed keys: prefill, decode and absorbed MLA. `api` is the door."""
