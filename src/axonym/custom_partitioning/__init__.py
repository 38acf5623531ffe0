"""Operations with their own partitioning: a rule by axis names, and a function for the shards of one device.

May change before 1.0.
"""

from .decorator import Partitioned as Partitioned, partitioned as partitioned
from .rule import PartitioningRule as PartitioningRule
