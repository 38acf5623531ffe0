"""Operations that bring their own partitioning: one rule by axis names, and a function for the part of one device."""

from .decorator import Partitioned as Partitioned, partitioned as partitioned
from .rule import PartitioningRule as PartitioningRule
