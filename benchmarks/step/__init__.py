# SPDX-License-Identifier: Apache-2.0
"""Profiles a step of a whole engine, of decode or of prompts, kernel by kernel."""
