"""How several processes train one model: layout, start, process groups, collectives."""
