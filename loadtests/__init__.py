# SPDX-License-Identifier: Apache-2.0
"""Load tests: a locust client for streaming completions, and a comparison of backends under the same load."""
