"""The registry's Lua scripts, one file each, and what loads them."""
