"""Measuring: `megamix bench`, and the counting of live memory that it and the tests share."""
