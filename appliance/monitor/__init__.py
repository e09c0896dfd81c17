"""Program `monitor`: a supervisor event listener that watches every replica and repairs what it can."""
