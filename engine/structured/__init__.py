"""Holds outputs to a grammar: JSON schemas, regular expressions, choices, Lark and GBNF grammars."""
