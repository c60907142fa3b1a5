"""Output held to a grammar: JSON schemas, regular expressions, choices, Lark and GBNF grammars."""
