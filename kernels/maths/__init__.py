"""The arithmetic of a cache's cells: rotary angles, and int8 with a scale. Moves nothing."""
