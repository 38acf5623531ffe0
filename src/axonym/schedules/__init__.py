"""Schedules: which stage of a model works on which microbatch, and when."""

from .pipelines import GPipe as GPipe, OneFOneB as OneFOneB
