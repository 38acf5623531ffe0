"""Schedules: which stage of a model works on which microbatch, and when."""

from .pipeline_schedules import GPipe as GPipe, OneFOneB as OneFOneB
