"""Operations on named arrays, one file for each family. May change before 1.0."""
