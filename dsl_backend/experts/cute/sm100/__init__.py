# SPDX-License-Identifier: Apache-2.0
"""The products of experts on SM100."""
