"""HTTP, whoever's API it carries: connections, bodies, who may ask and how much, errors, JSON written in steps."""
