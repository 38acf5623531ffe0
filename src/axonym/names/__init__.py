"""Names for code that has none: name the axes of functions of raw arrays from the names of their arguments.

May change before 1.0.
"""

from .distributing import distribute as distribute
from .inferring import MixUp as MixUp, NamedProgram as NamedProgram, UnnamedAxes as UnnamedAxes, infer as infer
from .naming import name as name, names_of as names_of, unname as unname
