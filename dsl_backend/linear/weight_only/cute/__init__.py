# SPDX-License-Identifier: Apache-2.0
"""Linear layers of packed weights by the CuTe DSL GEMMs."""
