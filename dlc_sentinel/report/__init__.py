"""The post-mortem of a run that is over: one HTML file that opens anywhere, Markdown for an issue, a picture.

story (what is told) -> figure, strips (pictures, inline SVG) -> html, markdown
"""
