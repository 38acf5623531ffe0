"""Schedules: which stage of a model works on which microbatch, and when. May change before 1.0."""

from .pipeline_schedules import GPipe as GPipe, OneFOneB as OneFOneB
