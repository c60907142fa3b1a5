"""What is inside a finished answer: reasoning and tool calls, in the formats that model families write them.

Pure: text in, parts out. Neither torch nor the engine is imported.
"""
