"""Measurements that need torch alone."""
