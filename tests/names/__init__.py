"""Tests of `axonym.names`."""
