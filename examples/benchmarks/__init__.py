"""Measurements that the results files quote."""
