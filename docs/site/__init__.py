"""The site: every page of the repository, with navigation and search.

`make docs` runs `__main__.py`, in this order:

1. `pages.py` reads `site.toml` and finds the pages and their places on the site.
2. `links.py` points links at those places. Links to other files lead to the repository, or to copies.
3. `markdown.py` and `diagrams.py` change what the generator reads differently from GitHub.
4. Zensical, which also reads MkDocs' settings, makes HTML of it.
5. `llms.py` adds `llms.txt` and, beside each page, its Markdown.
"""
