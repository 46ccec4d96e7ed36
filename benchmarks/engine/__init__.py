# SPDX-License-Identifier: Apache-2.0
"""Whole engines, one attention backend after the other: tokens per second of models with dummy weights."""
