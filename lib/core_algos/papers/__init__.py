"""Estimators and losses of other papers, imported by name (ADV_ESTIMATORS, POLICY_LOSSES)."""
