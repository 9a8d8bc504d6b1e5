"""Where the tokens of a layer stand: their keys and values, what is known of them, and the room."""
