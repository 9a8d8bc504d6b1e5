"""The page's views, each a file with its models, function and router; ``routes`` lists them."""
