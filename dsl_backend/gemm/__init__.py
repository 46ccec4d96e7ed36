# SPDX-License-Identifier: Apache-2.0
"""What the CuTe DSL linear layers of all SMs share: launches, tiles and who loads them, shares of a list of work."""
