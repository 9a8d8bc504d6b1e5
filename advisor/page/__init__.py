"""The page's views, each a file with its models, function and router; ``status`` lists them."""
