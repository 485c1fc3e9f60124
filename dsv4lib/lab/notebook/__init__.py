"""Know notebooks: what their cells call, which cells a metric needs, the glossary's links, the exercises."""
