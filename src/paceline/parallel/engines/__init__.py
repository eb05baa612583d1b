"""The engines, one for each way to spread a model, behind the contract of engine.py, and which one a plan asks for."""
