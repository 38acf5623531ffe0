"""Operations on named arrays, one file for each family."""
