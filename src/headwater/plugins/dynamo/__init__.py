"""A Dynamo worker that serves with a Headwater engine."""
