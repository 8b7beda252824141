"""Temperatures of attention: dividing the queries of every head by a number that changes while the model trains."""
