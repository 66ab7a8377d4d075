"""Captured graphs: capture through Dynamo and AOTAutograd, symbolic shapes, roles, source lines."""
