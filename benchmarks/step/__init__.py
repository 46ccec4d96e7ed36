# SPDX-License-Identifier: Apache-2.0
"""Profiles a decode step of a whole engine, kernel by kernel."""
