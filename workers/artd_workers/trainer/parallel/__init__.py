"""The processes that train one model together: how it is sharded, how they meet and agree."""
